from standin import run

from worker_svc.settings import WorkerSettings

run(WorkerSettings, "worker")
