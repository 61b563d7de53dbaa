"""Models by URL: http(s):// and s3://, fetched in parts by several connections."""
