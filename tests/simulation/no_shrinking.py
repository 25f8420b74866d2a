"""A pytest plugin that keeps Hypothesis from shrinking: any failing example will do."""

from __future__ import annotations

from hypothesis import Phase, settings

settings.register_profile("no shrinking", phases=[Phase.generate])
settings.load_profile("no shrinking")
