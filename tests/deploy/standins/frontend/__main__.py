from standin import run

from shared.config import FrontendSettings

run(FrontendSettings, "frontend")
