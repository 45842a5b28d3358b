"""What NVIDIA's Operator API offers for a problem, and why not the rest: its manifest, asked in a child."""

from cutegen.operator_api.answers import Design, Listing, Refused, ask_api, find_listing, listing_key
from cutegen.operator_api.offers import Offers, find_offers, offers_of

__all__ = [
    "Design",
    "Listing",
    "Offers",
    "Refused",
    "ask_api",
    "find_listing",
    "find_offers",
    "listing_key",
    "offers_of",
]
