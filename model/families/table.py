"""All families of baton's own decoder, and their rows by the names in config.json."""

from baton.model.families.dense import DENSE
from baton.model.families.family import Family
from baton.model.families.latent import LATENT
from baton.model.families.mixtures import MIXTURES
from baton.model.families.states import STATES

FAMILIES = (*DENSE, *MIXTURES, *LATENT, *STATES)
BY_ARCHITECTURE = {family.architecture: family for family in FAMILIES}
# Those that make no tokens, each with its head.
OTHER_HEADS = {
    name: (family, head)
    for family in FAMILIES
    for name, head in family.other_architectures.items()
}
BY_MODEL_TYPE = {family.model_type: family for family in FAMILIES}
WRAPPERS = {name for family in FAMILIES for name in family.wrappers}


def text_family(wrapper: str, model_type: str) -> Family | None:
    """Return the family of the text of a model that also sees; None if baton has none."""
    families = [family for family in FAMILIES if wrapper in family.wrappers]
    if not model_type:
        return families[0]
    named = (
        family
        for family in families
        if model_type in (family.model_type, *family.other_model_types)
    )
    return next(named, None)
