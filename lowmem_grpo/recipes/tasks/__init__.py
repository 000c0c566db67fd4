"""Problems and games that several recipes share, and the mails of the recipe `inbox`."""
