// SPDX-License-Identifier: Apache-2.0

package record

import (
	"maps"

	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel/instances"
)

// Copies returns the copy targets of all services of a namespace. A service without an existing target service is not
// copied.
func Copies(services map[string]*Service) map[bpf.CopyCopyKey]bpf.CopyCopyTo {
	out := map[bpf.CopyCopyKey]bpf.CopyCopyTo{}
	for _, p := range services {
		to := services[p.Service.Copy]
		if p.Service.Copy == "" || p.Bypassed || to == nil {
			continue
		}
		if targets, err := spec.CopyTargets(p.Service.Endpoints(), to.Service.Endpoints()); err == nil {
			maps.Copy(out, targets)
		}
	}
	return out
}

// KeepCopies adds existing copies to want if they may belong to unreadable services. Copies from known services and from
// services in gone are not kept. It changes have.
func KeepCopies(want, have map[bpf.CopyCopyKey]bpf.CopyCopyTo, services map[string]*Service, gone []*Service, unread instances.Unreadable) {
	free := func(p *Service) {
		for _, e := range p.Service.Endpoints() {
			delete(have, spec.CopyKey(e))
		}
	}
	for _, p := range gone {
		free(p)
	}
	for _, p := range services {
		if p.Bypassed || !unread.Has(Instance(unread[0].Scope, p.Service.Copy)) {
			free(p)
		}
	}
	for k, v := range have {
		v.Copied, v.Fragmented, v.Failed = 0, 0, 0
		want[k] = v
	}
}
