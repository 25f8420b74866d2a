from standin import run

from frontend.settings import FrontendSettings

run(FrontendSettings, "frontend")
