"""Real servers for tests: started on free loopback ports, killed, stopped and started again by the tests themselves."""
