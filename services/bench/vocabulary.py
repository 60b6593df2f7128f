"""Words to make prompts of: ordinary ones, so that any tokenizer has them, most as one token."""

from collections.abc import Sequence

SAMPLE = (
    "a about after again air all along also an and animal answer any are as ask at away back be because been "
    "before began below between big book both boy but by call came can change children city close cold come could "
    "country cut day did do does door down each earth eat end enough even every example eye face family far "
    "father feet few find first follow food for form found four from get girl give go good got great group grow "
    "had hand hard has have he head hear help her here high him his home house how idea if important in into is "
    "it just keep kind know land large last later learn leave left letter life light like line list little live "
    "long look made make man many may me mean men might mile more most mother mountain move much must my name "
    "near need never new next night no not now number of off often old on once one only open or other our out "
    "over own page paper part people place plant play point put question quick read really right river run said "
    "same saw say school sea second see seem sentence set she should show side small so some song soon sound "
    "spell start state still stop story study such take talk tell than that the their them then there these they "
    "thing think this those thought three through time to together too took tree try turn two under until up us "
    "use very walk want was watch water way we well went were what when where which while white who why will with "
    "without word work world would write year you young your"
)
WORDS = tuple(SAMPLE.split())


class Vocabulary:
    """token_ids: of SAMPLE in the model's tokenizer; empty when it cannot be asked, then prompts are text alone."""

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self._ids = tuple(dict.fromkeys(token_ids))

    def ids(self, words: Sequence[int]) -> list[int]:
        """One token id for each of these numbers; empty when there is no tokenizer."""
        return [self._ids[word % len(self._ids)] for word in words] if self._ids else []

    def text(self, words: Sequence[int]) -> str:
        return " ".join(WORDS[word % len(WORDS)] for word in words)
