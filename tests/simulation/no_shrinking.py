"""A pytest plugin: any failing example of Hypothesis will do, it need not be the shortest."""

from __future__ import annotations

from hypothesis import Phase, settings

settings.register_profile("no shrinking", phases=[Phase.generate])
settings.load_profile("no shrinking")
