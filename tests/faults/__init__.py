"""Fault campaigns against the embedded store: killed processes, failing disks, flipped bits.

``make test`` runs the short form, ``make faults`` (``POSTBUS_CAMPAIGN=full``) the full one. Every campaign prints its
seed; ``POSTBUS_FAULT_SEED`` repeats it.
"""
