"""Property tests run without a deadline: how long an example takes says nothing on a shared machine."""

from hypothesis import settings

settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
