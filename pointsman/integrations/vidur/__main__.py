"""Vidur's own command line, with our policies and the closed-form step time among its choices.

    python -m pointsman.integrations.vidur --global_scheduler_config_type pointsman \\
        --pointsman_global_scheduler_config_policy default …

All other options are Vidur's.
"""

from __future__ import annotations

from vidur.main import main

from pointsman.integrations.vidur import costs, scheduler

if __name__ == "__main__":
    scheduler.register()
    costs.register()
    main()
