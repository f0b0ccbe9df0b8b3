"""What commands print on a terminal: tables, styled lines, bars, sparklines and heat maps that fit its width."""
