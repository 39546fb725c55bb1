"""Plain LightningModules on real input that is already on the machine; nothing is downloaded."""
