"""The verdict: what the database holds in the end, against what it should."""

from dataclasses import dataclass
from datetime import date
from decimal import Decimal

from django.db.models import Sum

from hoa.charges import amount_due
from hoa.demo.guards import Variant
from hoa.meters import reading
from hoa.models import Charge, Organization


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What an interleaving has left behind."""

    runs: int
    charges: int
    charged: Decimal
    balances: Decimal
    due: Decimal  # for charging the month once
    endings: dict[str, str]  # of each replica

    @property
    def times(self) -> str:
        """Say how often the money was charged."""
        words = {
            0 * self.due: "not charged",
            self.due: "charged once",
            2 * self.due: "charged twice",
        }
        return words.get(self.charged, "charged in part")

    @property
    def totals(self) -> str:
        return (
            f"Runs: {self.runs}. Charges: {self.charges}, of {self.charged} in all. "
            f"The owners owe {self.balances}; {self.due} would be right."
        )

    def is_as_expected(self, variant: Variant) -> bool:
        """Tell if the interleaving has ended as it has to under the variant's guard."""
        return (
            self.runs == variant.runs
            and self.charged == self.balances == variant.runs * self.due
            and self.endings == variant.endings
        )


def observe(organization: Organization, month: date, endings: dict[str, str]) -> Observed:
    """Count what the organization's tables hold."""
    charges = Charge.objects.filter(run__organization=organization)
    readings = {
        unit.label: reading(unit.label, f"{month:%Y-%m}") for unit in organization.units.all()
    }
    return Observed(
        runs=organization.runs.count(),
        charges=charges.count(),
        charged=charges.aggregate(sum=Sum("amount", default=Decimal(0)))["sum"],
        balances=organization.units.aggregate(sum=Sum("balance"))["sum"],
        due=sum((amount_due(unit, readings) for unit in organization.units.all()), Decimal(0)),
        endings=endings,
    )
