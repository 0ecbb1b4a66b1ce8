"""The LightningDataModules."""
