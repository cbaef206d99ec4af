"""Where a delivery leaves. Each module is one kind of target."""
