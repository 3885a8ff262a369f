"""The Python client of the HTTP API."""

from postbus.client.blocking import SyncClient
from postbus.client.client import Client
from postbus.client.wire import Item, Leased

__all__ = ["Client", "Item", "Leased", "SyncClient"]
