from standin import run

from shared.config import WorkerSettings

run(WorkerSettings, "worker")
