"""Threads, tasks, budgets and deadlines: everything here waits in order and ends in time."""

from kvtier.concurrency.budget import Budget, Ticket
from kvtier.concurrency.clock import Clock, SystemClock
from kvtier.concurrency.deadline import Deadline
from kvtier.concurrency.supervisor import Supervisor
from kvtier.concurrency.workers import Workers

__all__ = ["Budget", "Clock", "Deadline", "Supervisor", "SystemClock", "Ticket", "Workers"]
