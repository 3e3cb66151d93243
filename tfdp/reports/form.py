"""What forms are filled with: facts, answers, and blanks with their questions."""

from tfdp._types import Config
from tfdp.accounting import BestOf
from tfdp.accounting.meaning import in_words
from tfdp.reports.questions import BLANK, QUESTIONS


class Form:
    """Says what a report knows in the words that several forms have.

    Args:
        facts: See `facts_of`.

    Attributes:
        facts: As given.
    """

    def __init__(self, facts: Config) -> None:
        """Read the facts."""
        self.facts = facts

    def answer(self, name: str) -> str:
        """Return the answer to a question, or a blank with the question."""
        answers: dict[str, str] = self.facts["answers"]
        return answers.get(name, f'{BLANK} {QUESTIONS[name]} [answers: "{name}"]')

    @property
    def is_private(self) -> bool:
        """Whether an epsilon holds."""
        return bool(self.facts["differentially_private"])

    @property
    def is_of_users(self) -> bool:
        """Whether users are the unit of all that ran."""
        return bool(self.facts["units"] == ["user"])

    @property
    def guarantee(self) -> str:
        """The headline."""
        delta, epsilon = self.facts["delta"], self.facts["epsilon"]
        if self.is_private:
            return (
                f"({epsilon:.3f}, {delta:g})-differential privacy, by the "
                f"{self.facts['accountant']} accountant."
            )
        if self.facts["plain_keras_steps"]:
            return (
                "None: plain Keras trained the model without noise after it had become "
                "private."
            )
        return "None: steps ran without noise."

    @property
    def meaning(self) -> str:
        """What it means to a person."""
        rate = self.facts["best_attack"]["true_positive_rate"]
        return in_words(rate, of_users=self.is_of_users)

    @property
    def trainings(self) -> str:
        """What ran, or was planned."""
        return "; ".join(self.facts["trainings"]) or "nothing"

    @property
    def mechanism(self) -> str:
        """What was done in each step."""
        return (
            "DP-SGD: in each step the gradient of every record is clipped to an l2 norm, "
            "the clipped ones are added up, Gaussian noise is added to the sum once, and "
            "it is divided by the expected number of records. Library: tfdp "
            f"{self.facts['versions']['tfdp']}. What ran: {self.trainings}."
        )

    @property
    def composition(self) -> str:
        """How costs add up."""
        kinds = {each["kind"] for each in self.facts["planned_segments"]}
        how = (
            "by Rényi differential privacy alone: a search counts with all of its tries, "
            "not with the steps of its winner."
            if BestOf.kind in kinds
            else "by privacy loss distributions and by Rényi differential privacy; the "
            "smaller bound is stated."
        )
        return (
            "All trainings that the weights come from, and all noised answers that "
            "callbacks asked for, are composed as trainings on the same rows "
            f"({self.facts['steps']} steps), {how}"
        )

    @property
    def arithmetic(self) -> str:
        """How noise is drawn."""
        seeds = {"noise_seed_fixed": "the noise", "sampling_seed_fixed": "the draws"}
        chosen = [words for name, words in seeds.items() if self.facts[name]]
        return (
            "Noise is drawn by the counter-based generator Philox, in float32 or wider, "
            "added once to a sum, and rounded with it. Clip factors are rounded down, so "
            "that no rounded contribution is above the clip norm. Philox is no certified "
            "cryptographic generator, and attacks on the low bits of single gradients "
            "are not ruled out. "
        ) + (
            f"Somebody chose a seed for {' and for '.join(chosen)}, and may know it."
            if chosen
            else "Seeds came from the operating system, and nobody knows them."
        )

    @property
    def untrained(self) -> str:
        """Which weights no private step made."""
        paths = ", ".join(f"`{path}`" for path in self.facts["not_trained"]) or "none"
        return f"Weights that no private step updated: {paths}."

    @property
    def fingerprint(self) -> str:
        """Which weights the report is about."""
        weights = self.facts["weights"]
        return f"{weights['number']} numbers, `{weights['sha256']}` ({weights['how']})."

    @property
    def audits(self) -> str:
        """What audits found, or the question."""
        found = "; ".join(
            ", ".join(f"{name}: {value}" for name, value in audit.items())
            for audit in self.facts["audits"]
        )
        if not self.audits_agree:
            return f"An audit CONTRADICTS what is stated here: {found}"
        return found or self.answer("audit")

    @property
    def audits_agree(self) -> bool:
        """Whether no audit has found that something else ran than was counted."""
        return all(
            audit.get("nonprivate_passed", True) for audit in self.facts["audits"]
        )

    @property
    def budget(self) -> str:
        """What training is kept within; empty for nothing."""
        budget = self.facts["budget"]
        if not budget:
            return ""
        return (
            f"({budget['target_epsilon']:g}, {budget['delta']:g}) was set; training "
            "stops before it would be overspent."
        )
