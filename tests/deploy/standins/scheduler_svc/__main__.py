from standin import run

from shared.config import SchedulerSettings

run(SchedulerSettings, "scheduler")
