"""Results as files and tables: read, checked, merged, shown, exported."""
