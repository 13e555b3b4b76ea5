// The products are in device.cuh here.
