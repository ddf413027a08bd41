"""tiercache."""
