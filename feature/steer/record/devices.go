// SPDX-License-Identifier: Apache-2.0

package record

import (
	"bytes"
	"fmt"

	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
)

// ReadDevices reads a service's devices from its pins. It returns nil if the service has none.
func ReadDevices(r *kernel.Root, p *Service, scope string) (*spec.DeviceList, error) {
	if p.Devices == nil {
		return nil, nil
	}
	o, err := r.Open(Instance(scope, p.Service.Name), "names")
	if err != nil {
		return nil, err
	}
	defer o.Close()
	var text bytes.Buffer
	for i := range o.Maps["names"].MaxEntries() {
		chunk, err := o.Maps["names"].LookupBytes(i)
		if err != nil {
			return nil, fmt.Errorf("read the devices of service %s: %w", p.Service.Name, err)
		}
		text.Write(chunk)
	}
	return spec.ParseDevices("the pins of service "+p.Service.Name, text.Bytes())
}

// SetDevices sets the devices of a service.
func (p *Service) SetDevices(l *spec.DeviceList) { p.Devices, p.List = l.File(), l }
