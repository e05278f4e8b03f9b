// SPDX-License-Identifier: Apache-2.0

// Package admit decides about backends that connect to a load balancer: their registrations, and the
// numbers of absent backends.
package admit

import (
	"fmt"
	"slices"

	"github.com/weir-project/weir/feature/handoff/lb/spec"
	"github.com/weir-project/weir/feature/handoff/peer"
)

// Registration checks a registration by itself and by the load balancer's services. It removes
// names of services that the load balancer no longer has from the unserved ones.
func Registration(r *peer.Registration, services []spec.Service) error {
	r.Address = r.Address.Unmap() // an IPv4-mapped address equals its IPv4 form
	if err := r.Check(); err != nil {
		return err
	}
	switch {
	case !r.Address.IsValid() || !spec.Unicast(r.Address):
		return fmt.Errorf("address %q: want a unicast address of the backend", r.Address)
	case r.Weight < 0 || r.Weight > spec.MaxWeight:
		return fmt.Errorf("weight %d: want 0 to %d", r.Weight, spec.MaxWeight)
	}
	has := func(name string) bool {
		return slices.ContainsFunc(services, func(s spec.Service) bool { return s.Name == name })
	}
	for _, name := range r.Services {
		if !has(name) {
			return fmt.Errorf("service %q: this load balancer has no service of this name", name)
		}
	}
	r.Unserved = slices.DeleteFunc(r.Unserved, func(name string) bool { return !has(name) })
	for _, s := range services {
		if s.Listen.Addr().Unmap() == r.Address {
			return fmt.Errorf("address %s belongs to service %s: give an address of the backend alone", r.Address, s.Name)
		}
	}
	return nil
}
