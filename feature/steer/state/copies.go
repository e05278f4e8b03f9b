// SPDX-License-Identifier: Apache-2.0

package state

import (
	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
	"golang.org/x/sys/unix"
)

// addCopies adds the counters of a service's copies.
func (s *Service) addCopies(r *kernel.Root) {
	if s.Record.Service.Copy == "" {
		return
	}
	s.Copies = &engine.Copies{To: s.Record.Service.Copy}
	o, err := r.Open(engine.CopyInstance(s.PinScope), "targets")
	if err != nil {
		if !s.Bypassed && s.Problem == "" {
			s.Problem = engine.ProblemCopy
		}
		return
	}
	defer o.Close()
	for _, e := range s.Endpoints {
		var v bpf.CopyCopyTo
		if e.Proto == unix.IPPROTO_UDP && o.Maps["targets"].Lookup(spec.CopyKey(e), &v) == nil {
			s.Copies.Copied += v.Copied
			s.Copies.Fragmented += v.Fragmented
			s.Copies.Failed += v.Failed
		}
	}
}
