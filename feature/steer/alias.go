// SPDX-License-Identifier: Apache-2.0

package steer

import (
	"fmt"

	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
)

// loadDevices reads the file of a service that is by device.
func (t *target) loadDevices() error {
	if t.service.By != spec.ByDevice {
		return nil
	}
	var err error
	if t.devices, err = spec.LoadDevices(t.service.Devices); err != nil {
		return fmt.Errorf("services.%s.steer.devices: %w", t.service.Name, err)
	}
	return nil
}

// inherits is what a service goes on from.
func (t target) inherits(old *record.Service) *record.Service {
	if old != nil {
		return old
	}
	return t.from
}
