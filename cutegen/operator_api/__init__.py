"""NVIDIA's Operator API as a source of candidates: its manifest is asked in a child process."""

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
