"""How much a plan holds, and which option of ``packer plan`` makes it hold more."""

from packer.plan import Plan


def num_planned_steps(plan: Plan) -> int:
    """Return the updates of all epochs."""
    return sum(int(epoch["num_steps"]) for epoch in plan.header["epochs"])


def option_for_more(plan: Plan) -> str:
    """Return the option that makes a plan longer: the total that ends it, or the number of its epochs."""
    for option in ("total_tokens", "total_steps"):
        if plan.config.get(option) is not None:
            return "--" + option.replace("_", "-")
    return "--epochs"
