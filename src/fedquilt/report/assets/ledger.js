function ledgerPage() { return () => {}; }
