"""The extensions that come with Postbus. Each folder is one, loaded like anybody's when the settings name it."""
