"""Running a call: the call cache, schedules on devices, and the executors."""
