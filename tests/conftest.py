"""Settings that all tests share."""

from hypothesis import settings

# Deterministic: a failure in CI is a failure here. No deadline: a shared machine may
# stop for a moment in any example.
settings.register_profile("tailbound", derandomize=True, deadline=None)
settings.load_profile("tailbound")
