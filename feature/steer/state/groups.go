// SPDX-License-Identifier: Apache-2.0

package state

import (
	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
)

// ExamineGroups reports causes that keep packets from the programs of a service's groups.
func (s *Service) ExamineGroups(r *kernel.Root, add func(text, remedy string)) {
	if s.Engine != spec.EngineReuseport {
		return
	}
	e, err := r.Open(record.EngineInstance(s.PinScope, s.Engine), "groups", "holders")
	if err != nil {
		return // the service's Problem reports it
	}
	defer e.Close()
	groups, err := engine.Entries[engine.GroupKey, engine.GroupValue](e.Maps["groups"])
	if err != nil {
		return
	}
	for k, v := range groups {
		if v.Service != s.Record.ID {
			delete(groups, k)
		}
	}
	ns, err := s.OpenNetns()
	if err != nil {
		return
	}
	defer ns.Close()
	ns.Do(func() error {
		for _, text := range engine.Hijacked(groups, e.Maps["holders"]) {
			add(text, "turn off the daemons' own balancer, then run weir steer admit for their slots")
		}
		for _, text := range engine.Narrower(groups) {
			add(text, "end that process, or use engine sk_lookup, because it precedes the kernel's own choice")
		}
		return nil
	})
}
