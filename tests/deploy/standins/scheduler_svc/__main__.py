from standin import run

from scheduler_svc.settings import SchedulerSettings

run(SchedulerSettings, "scheduler")
