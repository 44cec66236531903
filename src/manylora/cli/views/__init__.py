"""What commands print: tables, reports and live screens, and where these get their figures."""
