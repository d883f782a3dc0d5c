"""All that differs between machines: devices, collectives, attention modules and the masks each of them honours."""
