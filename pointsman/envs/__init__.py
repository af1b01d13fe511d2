"""Environments to learn in; `gymnasium` knows them as "pointsman/…".

Nothing here needs gymnasium: a router that only loads a policy should not import it. `import
pointsman.envs.gym` registers in any case, `import pointsman.envs` where gymnasium was imported before.
"""

from __future__ import annotations

import sys

ROUTING_ID = "pointsman/Routing-v0"


def register_environments() -> None:
    """Tell gymnasium what `make` and `make_vec` can make; twice does no harm."""
    import gymnasium

    if ROUTING_ID not in gymnasium.registry:
        gymnasium.register(
            ROUTING_ID,
            entry_point="pointsman.envs.gym:GymRoutingEnv",
            vector_entry_point="pointsman.envs.gym:GymRoutingVectorEnv",
        )


if "gymnasium" in sys.modules:
    register_environments()
