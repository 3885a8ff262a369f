"""The embedded database: one writer with group commit, readers, migrations, verification and backup."""

from postbus.store.backup import backup, restore
from postbus.store.database import Store
from postbus.store.folder import Folder, ServeLock
from postbus.store.salvage import salvage
from postbus.store.verify import Problem, Report, verify

__all__ = ["Folder", "Problem", "Report", "ServeLock", "Store", "backup", "restore", "salvage", "verify"]
