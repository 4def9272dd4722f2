import asyncio
import gc
import random
import threading
import weakref

import pytest

from kvtier.concurrency import Workers
from kvtier.concurrency.workers import work_for
from kvtier.errors import BackendTimeoutError, BackendUnavailableError, ClosedError


@pytest.fixture
async def gates():
    """Events that jobs wait for; all are opened in the end, so that no test leaves a stuck thread behind."""
    events = []

    def make():
        events.append(threading.Event())
        return events[-1]

    yield make
    for event in events:
        event.set()


class Blocking:
    """A job that says when it has begun and ends when it is told to."""

    def __init__(self, gate):
        self.gate = gate
        self.begun = threading.Event()
        self.ended = threading.Event()

    def __call__(self, result=None):
        self.begun.set()
        self.gate.wait()
        self.ended.set()
        return result


async def begun(job):
    await asyncio.to_thread(job.begun.wait)


async def turns_of_the_loop(condition):
    """Let the loop and other threads run until `condition()` holds; a broken one is stopped by the test's timeout."""
    while not condition():
        await asyncio.sleep(0)


def threads_of(workers):
    return [thread for thread in threading.enumerate() if thread.name.startswith(f"kvtier-{workers.name}-")]


async def test_result_arguments_and_thread():
    workers = Workers("basic", 2)
    assert threads_of(workers) == []  # started when needed
    assert await workers.run(pow, 2, 10) == 1024
    thread = await workers.run(threading.current_thread)
    assert thread is not threading.current_thread()
    assert thread.daemon
    assert await workers.aclose(5.0) is True
    assert threads_of(workers) == []


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), SystemExit(3), asyncio.CancelledError()])
async def test_whatever_the_job_raises_reaches_the_caller_and_spares_the_thread(error):
    workers = Workers("raising", 1)

    def fail():
        raise error

    with pytest.raises(type(error)) as caught:
        await workers.run(fail)
    assert caught.value is error
    assert await workers.run(int) == 0
    await workers.aclose(5.0)


async def test_stop_iteration_comes_as_runtime_error():
    workers = Workers("stop", 1)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await workers.run(next, iter(()))
    await workers.aclose(5.0)


async def test_at_most_size_jobs_run_and_the_queue_is_fifo(gates):
    workers = Workers("fifo", 2)
    blockers = [Blocking(gates()) for _ in range(2)]
    order = []
    tasks = [asyncio.create_task(workers.run(job)) for job in blockers]
    for job in blockers:
        await begun(job)
    tasks += [asyncio.create_task(workers.run(order.append, i)) for i in range(20)]
    await asyncio.sleep(0)
    assert (workers.busy, workers.queued) == (2, 20)
    assert order == []
    blockers[0].gate.set()  # one thread for all of them: order shows
    await asyncio.gather(tasks[0], *tasks[2:])
    assert order == list(range(20))
    assert len(threads_of(workers)) == 2
    blockers[1].gate.set()
    await tasks[1]
    assert (workers.busy, workers.queued) == (0, 0)
    await workers.aclose(5.0)


async def test_idle_threads_are_used_before_new_ones_are_started():
    workers = Workers("lazy", 8)
    for _ in range(20):
        await workers.run(int)
    assert len(threads_of(workers)) == 1
    await workers.aclose(5.0)


async def test_cancelled_while_queued_never_starts_and_ends_at_once(gates):
    workers = Workers("queued", 1)
    blocker = Blocking(gates())
    first = asyncio.create_task(workers.run(blocker))
    await begun(blocker)

    class Argument:
        pass

    argument = Argument()
    watch = weakref.ref(argument)
    ran = []
    second = asyncio.create_task(workers.run(ran.append, argument))
    del argument
    await asyncio.sleep(0)
    assert workers.queued == 1
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert workers.queued == 0
    del second
    await asyncio.sleep(0)  # asyncio itself holds the error, and its frames, for this turn
    gc.collect()
    assert watch() is None
    blocker.gate.set()
    await first
    await workers.run(int)
    assert ran == []
    await workers.aclose(5.0)


async def test_cancelled_while_running_waits_for_the_end(gates):
    """K8: when the call is over, nothing touches its memory any more."""
    workers = Workers("k8", 1)
    job = Blocking(gates())
    task = asyncio.create_task(workers.run(job))
    await begun(job)
    for _ in range(3):  # however often
        task.cancel()
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()
    job.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert job.ended.is_set()
    await workers.aclose(5.0)


async def test_a_timeout_around_a_running_job_comes_after_its_end(gates):
    workers = Workers("timeout", 1)
    job = Blocking(gates())

    async def bounded():
        async with asyncio.timeout(0) as scope:
            scopes.append(scope)
            await workers.run(job)

    scopes = []
    task = asyncio.create_task(bounded())
    await begun(job)
    await turns_of_the_loop(lambda: scopes and scopes[0].expired())
    assert not task.done()
    job.gate.set()
    with pytest.raises(TimeoutError):
        await task
    assert job.ended.is_set()
    await workers.aclose(5.0)


async def test_cancelled_beats_the_result_that_came_in_the_same_turn(gates):
    workers = Workers("tie", 1)
    job = Blocking(gates())
    task = asyncio.create_task(workers.run(job))
    await begun(job)
    job.gate.set()
    job.ended.wait()
    while workers.busy:  # the thread is through; this loop has not looked at it
        pass
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await workers.aclose(5.0)


async def test_an_abandoned_job_is_counted_replaced_and_still_waited_for(gates):
    abandoned = asyncio.Event()
    loop_thread = threading.current_thread()

    def on_abandoned():
        assert threading.current_thread() is loop_thread
        abandoned.set()

    workers = Workers("stuck", 1, job_seconds=0.01, on_abandoned=on_abandoned)
    job = Blocking(gates())
    task = asyncio.create_task(workers.run(job, "late"))
    await asyncio.wait_for(abandoned.wait(), 20)
    assert (workers.busy, workers.abandoned) == (0, 1)
    assert not task.done()
    assert await workers.run(int) == 0  # in the replacement
    assert len(threads_of(workers)) == 2
    job.gate.set()
    assert await task == "late"
    await turns_of_the_loop(lambda: len(threads_of(workers)) == 1)  # one of the two is surplus now
    assert (workers.busy, workers.abandoned) == (0, 0)
    assert await workers.run(int) == 0
    assert await workers.aclose(5.0) is True


async def test_waiting_in_the_queue_is_not_being_stuck(gates):
    told = []
    workers = Workers("patience", 1, job_seconds=30.0, on_abandoned=lambda: told.append(1))
    job = Blocking(gates())
    first = asyncio.create_task(workers.run(job))
    await begun(job)
    second = asyncio.create_task(workers.run(int))
    await asyncio.sleep(0)
    (waiting,) = workers._queue
    timer = waiting.timer
    workers._check(waiting, 30.0)  # its timer fires while it is queued
    assert (workers.abandoned, told) == (0, [])
    assert waiting.timer is not timer  # and will look again
    job.gate.set()
    await asyncio.gather(first, second)
    await workers.aclose(5.0)


async def test_the_limit_counts_from_the_start_of_the_job(gates):
    workers = Workers("clock", 1, job_seconds=30.0)
    job = Blocking(gates())
    task = asyncio.create_task(workers.run(job))
    await begun(job)
    (running,) = workers._running
    workers._check(running, 30.0)
    assert workers.abandoned == 0
    assert running.timer.when() == pytest.approx(running.started + 30.0)
    running.started -= 30.0
    workers._check(running, 30.0)
    assert workers.abandoned == 1
    workers._check(running, 30.0)
    assert workers.abandoned == 1  # counted once
    job.gate.set()
    await task
    await workers.aclose(5.0)


async def test_with_every_thread_stuck_calls_fail_at_once_until_one_returns(gates):
    size = 2
    workers = Workers("down", size, job_seconds=0.01)
    jobs = [Blocking(gates()) for _ in range(2 * size)]
    tasks = [asyncio.create_task(workers.run(job)) for job in jobs]
    await turns_of_the_loop(lambda: workers.queued == 0)
    last = asyncio.create_task(workers.run(int))
    with pytest.raises(BackendTimeoutError, match="stuck"):
        await last  # it was queued when the last thread was written off
    assert workers.abandoned == 2 * size
    assert len(threads_of(workers)) == 2 * size
    with pytest.raises(BackendTimeoutError, match="stuck"):
        await workers.run(int)
    jobs[0].gate.set()
    await tasks[0]
    assert await workers.run(int) == 0
    for job in jobs:
        job.gate.set()
    await asyncio.gather(*tasks)
    await turns_of_the_loop(lambda: len(threads_of(workers)) == size)
    assert (workers.busy, workers.abandoned, workers.queued) == (0, 0, 0)
    await workers.aclose(5.0)


async def test_a_returned_job_never_makes_more_than_size_busy(gates):
    abandoned = asyncio.Event()
    workers = Workers("surplus", 1, job_seconds=0.01, on_abandoned=abandoned.set)
    stuck = Blocking(gates())
    first = asyncio.create_task(workers.run(stuck))
    await asyncio.wait_for(abandoned.wait(), 20)
    workers._job_seconds = None
    jobs = [Blocking(gates()) for _ in range(3)]
    tasks = [asyncio.create_task(workers.run(job)) for job in jobs]
    await begun(jobs[0])
    stuck.gate.set()
    await first
    await turns_of_the_loop(lambda: len(threads_of(workers)) == 1)
    assert (workers.busy, workers.queued) == (1, 2)
    for job in jobs:
        job.gate.set()
    await asyncio.gather(*tasks)
    await workers.aclose(5.0)


async def test_nothing_of_an_ended_job_stays_alive():
    workers = Workers("leak", 1)

    class Tracked:
        pass

    class TrackedError(Exception):
        pass

    def work(argument):
        return Tracked()

    def fail(argument):
        raise TrackedError(argument)

    argument = Tracked()
    result = await workers.run(work, argument)
    watches = [weakref.ref(argument), weakref.ref(result)]
    del argument, result
    argument = Tracked()
    watches.append(weakref.ref(argument))
    try:
        await workers.run(fail, argument)
    except TrackedError as exc:
        watches.append(weakref.ref(exc))
    del argument
    await turns_of_the_loop(lambda: workers._idle == 1)  # its thread waits for the next job, which never comes
    await asyncio.sleep(0)  # asyncio itself holds the error, and its frames, for a turn
    assert [watch() for watch in watches] == [None] * 4
    await workers.aclose(5.0)


async def test_aclose_lets_jobs_end_and_refuses_new_ones(gates):
    workers = Workers("close", 1)
    job = Blocking(gates())
    running = asyncio.create_task(workers.run(job, 1))
    await begun(job)
    queued = asyncio.create_task(workers.run(pow, 3, 2))
    await asyncio.sleep(0)
    closing = asyncio.create_task(workers.aclose(60.0))
    await asyncio.sleep(0)
    with pytest.raises(ClosedError, match="close"):
        await workers.run(int)
    assert not closing.done()
    job.gate.set()
    assert await closing is True
    assert (await running, await queued) == (1, 9)
    assert threads_of(workers) == []
    assert await workers.aclose(0.0) is True


async def test_aclose_ends_although_a_job_does_not(gates):
    workers = Workers("hang", 1)
    job = Blocking(gates())
    running = asyncio.create_task(workers.run(job))
    await begun(job)
    queued = asyncio.create_task(workers.run(int))
    await asyncio.sleep(0)
    assert await workers.aclose(0.01) is False
    with pytest.raises(BackendTimeoutError, match="ran on"):
        await running
    with pytest.raises(BackendTimeoutError, match="before the job began"):
        await queued
    job.gate.set()
    assert await workers.aclose(20.0) is True


async def test_a_cancelled_aclose_frees_the_callers_too(gates):
    workers = Workers("cancel", 1)
    job = Blocking(gates())
    running = asyncio.create_task(workers.run(job))
    await begun(job)
    closing = asyncio.create_task(workers.aclose(60.0))
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(BackendTimeoutError):
        await running
    job.gate.set()
    assert await workers.aclose(20.0) is True


async def test_a_refused_thread_is_a_clear_error(monkeypatch):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    workers = Workers("poor", 1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(BackendUnavailableError, match=r"poor.*can't start"):
            await workers.run(int)
    assert workers.queued == 0
    assert await workers.run(int) == 0
    await workers.aclose(5.0)


def test_senseless_size():
    with pytest.raises(ValueError, match="size=0"):
        Workers("none", 0)


def test_threads_survive_a_loop_that_is_closed_under_their_job():
    workers = Workers("loops", 1)
    gate = threading.Event()
    job = Blocking(gate)

    async def leave_running():
        task = asyncio.create_task(workers.run(job))
        await begun(job)
        return task

    loop = asyncio.new_event_loop()
    task = loop.run_until_complete(leave_running())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    gate.set()
    task.get_coro().close()  # what garbage collection would do
    task._log_destroy_pending = False

    async def use_again():
        assert await workers.run(int) == 0
        assert len(threads_of(workers)) == 1
        assert await workers.aclose(5.0) is True

    asyncio.run(use_again())


def test_a_job_queued_on_a_loop_that_is_closed_never_starts():
    workers = Workers("orphan", 1)
    job = Blocking(threading.Event())
    ran = []

    async def leave_queued():
        tasks = [asyncio.create_task(workers.run(job)), asyncio.create_task(workers.run(ran.append, 1))]
        await begun(job)
        assert workers.queued == 1
        return tasks

    loop = asyncio.new_event_loop()
    tasks = loop.run_until_complete(leave_queued())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    for task in tasks:
        task.get_coro().close()  # what garbage collection would do
        task._log_destroy_pending = False
    assert workers.queued == 0
    job.gate.set()
    assert asyncio.run(workers.aclose(20.0)) is True
    assert ran == []


@pytest.mark.parametrize("seed", range(10))
async def test_random_schedules(seed):
    """Every job runs once or never; one that ran has ended when its caller goes on; nothing is left over."""
    rng = random.Random(seed)
    workers = Workers("random", 3)
    running = threading.Semaphore(3)
    ran, ended, wrong = [], [], []

    def job(number):
        if not running.acquire(blocking=False):
            wrong.append(f"{number}: more than 3 at once")
        ran.append(number)
        sum(range(number % 7 * 300))
        ended.append(number)
        running.release()
        return number

    async def caller(number):
        result = None
        try:
            result = await workers.run(job, number)
        finally:
            if number in ran and number not in ended:
                wrong.append(f"{number}: still runs")
        return result

    tasks = [asyncio.create_task(caller(number)) for number in range(150)]
    for _ in range(50):
        await asyncio.sleep(0)
        rng.choice(tasks).cancel()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    assert wrong == []
    assert len(ran) == len(set(ran)) == len(ended)
    for number, result in enumerate(results):
        assert isinstance(result, asyncio.CancelledError) or (result == number and number in ran)
    assert (workers.busy, workers.queued) == (0, 0)
    assert await workers.aclose(5.0) is True


async def test_background_jobs_keep_half_of_the_threads_and_wait_behind_all_others(gates):
    workers = Workers("classes", 4)
    gate = gates()
    later = [Blocking(gate) for _ in range(6)]
    waiting = [asyncio.ensure_future(workers.run_background(job, i)) for i, job in enumerate(later)]
    await asyncio.gather(begun(later[0]), begun(later[1]))
    assert await workers.run(pow, 2, 3) == 8  # two threads are left for it
    assert (workers.busy, workers.queued) == (2, 4)
    now = [Blocking(gate) for _ in range(2)]
    first = [asyncio.ensure_future(workers.run(job, -i)) for i, job in enumerate(now)]
    await asyncio.gather(*(begun(job) for job in now))
    assert not any(job.begun.is_set() for job in later[2:])
    gate.set()
    assert await asyncio.gather(*waiting, *first) == [0, 1, 2, 3, 4, 5, 0, -1]
    assert await workers.aclose(5)


async def test_one_thread_takes_what_is_in_a_hurry_first(gates):
    workers, order, gate = Workers("one", 1), [], gates()
    stuck = Blocking(gate)
    running = asyncio.ensure_future(workers.run(stuck))
    await begun(stuck)
    rest = [asyncio.ensure_future(workers.run_background(order.append, f"later {i}")) for i in range(3)]
    await asyncio.sleep(0)
    rest += [asyncio.ensure_future(workers.run(order.append, f"now {i}")) for i in range(3)]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(running, *rest)
    assert order == ["now 0", "now 1", "now 2", "later 0", "later 1", "later 2"]
    assert await workers.aclose(5)


async def test_a_background_job_that_is_cancelled_in_the_queue_never_starts(gates):
    workers, gate = Workers("cancelled-later", 2), gates()
    first, second = Blocking(gate), Blocking(gate)
    running = asyncio.ensure_future(workers.run_background(first))
    await begun(first)
    queued = asyncio.ensure_future(workers.run_background(second))
    await asyncio.sleep(0)
    queued.cancel()
    with pytest.raises(asyncio.CancelledError):
        await queued
    gate.set()
    await running
    assert not second.begun.is_set()
    assert await workers.aclose(5)


class Changing:
    """An urgency that a test changes."""

    background = True

    def __init__(self):
        self.to_tell = set()

    def tell(self, changed):
        self.to_tell.add(changed)


async def in_task(coroutine, urgency):
    """Run in a task of its own, whose jobs are of this urgency."""

    async def run():
        work_for(urgency)
        return await coroutine

    return await asyncio.create_task(run())


async def test_jobs_are_of_their_tasks_urgency(gates):
    workers, gate = Workers("tasks", 3, most_background=2), gates()
    jobs = [Blocking(gate) for _ in range(4)]
    waiting = [asyncio.ensure_future(in_task(workers.run(job), Changing())) for job in jobs]
    await asyncio.gather(begun(jobs[0]), begun(jobs[1]))
    assert await workers.run(pow, 2, 3) == 8  # one thread is left for it, and this task is in the foreground
    assert (workers.busy, workers.queued) == (2, 2)
    gate.set()
    await asyncio.gather(*waiting)
    assert await workers.aclose(5)


async def test_a_waiting_job_whose_urgency_changes_goes_first(gates):
    workers, gate, order = Workers("changes", 1), gates(), []
    stuck = Blocking(gate)
    running = asyncio.ensure_future(in_task(workers.run(stuck), Changing()))
    await begun(stuck)
    urgencies = [Changing() for _ in range(3)]
    rest = [
        asyncio.ensure_future(in_task(workers.run(order.append, number), urgency))
        for number, urgency in enumerate(urgencies)
    ]
    await turns_of_the_loop(lambda: workers.queued == 3)
    urgencies[2].background = False
    gate.set()
    await asyncio.gather(running, *rest)
    assert order == [2, 0, 1]
    assert await workers.aclose(5)


class Seen(Changing):
    """An urgency that tells when a thread other than the loop's has looked at it."""

    def __init__(self):
        super().__init__()
        self.now, self.looked, self.own = True, threading.Event(), threading.get_ident()

    @property
    def background(self):
        if threading.get_ident() != self.own:
            self.looked.set()
        return self.now


async def test_an_idle_thread_hears_of_an_urgency_that_changes(gates):
    workers, gate, urgency = Workers("hears", 2, most_background=1), gates(), Seen()
    stuck = Blocking(gate)
    running = asyncio.ensure_future(workers.run_background(stuck))
    await begun(stuck)
    assert await workers.run(pow, 2, 3) == 8  # its thread is idle from now on
    queued = asyncio.ensure_future(in_task(workers.run(pow, 2, 4), urgency))
    await turns_of_the_loop(lambda: workers.queued == 1)
    assert await asyncio.to_thread(urgency.looked.wait, 20)  # the idle thread has found nothing to do, and waits again
    urgency.now = False
    (changed,) = urgency.to_tell
    changed()
    assert await asyncio.wait_for(queued, 20) == 16  # neither an end nor a further job wakes the thread
    gate.set()
    await running
    assert await workers.aclose(5)


async def test_a_job_whose_urgency_changed_can_still_be_cancelled_in_the_queue(gates):
    workers, gate, urgency = Workers("withdrawn", 1), gates(), Changing()
    stuck, never = Blocking(gate), Blocking(gate)
    running = asyncio.ensure_future(workers.run(stuck))
    await begun(stuck)
    queued = asyncio.ensure_future(in_task(workers.run(never), urgency))
    await turns_of_the_loop(lambda: workers.queued == 1)
    urgency.background = False
    queued.cancel()
    with pytest.raises(asyncio.CancelledError):
        await queued
    assert workers.queued == 0
    gate.set()
    await running
    assert not never.begun.is_set()
    assert await workers.aclose(5)


async def test_an_idle_thread_takes_what_an_abandoned_job_held_up(gates):
    workers, gate = Workers("held-up", 2, job_seconds=0.05), gates()
    stuck = Blocking(gate)
    running = asyncio.ensure_future(workers.run_background(stuck))
    await begun(stuck)
    assert await workers.run(pow, 2, 3) == 8  # its thread is idle from now on, and waits
    assert await asyncio.wait_for(workers.run_background(pow, 2, 4), 20) == 16  # no further job comes to wake it
    gate.set()
    await running
    assert await workers.aclose(5)
