"""One delivery, whatever the row: what outbox and scheduled messages have in common.

    claimed row ─▶ attempt (gate, look-up, call under a time limit) ─▶ answer ─▶ judge ─▶ outcome ─▶ settle

Tables, statuses and statements belong to the stores (`bullpen.ledger`), which rows are taken to who takes them
(`bullpen.outbox`, `bullpen.messages`). Outcomes are records of the ledger: `Sent`, `Retried`, `Died`, `Released`.
"""
