// SPDX-License-Identifier: Apache-2.0

package templates

import (
	"fmt"
	"slices"
	"time"

	"github.com/weir-project/weir/feature/steer/bpf"
	"github.com/weir-project/weir/kernel"
)

// makeRoom enforces the limits of the sessions after key was added or has grown.
func (t *Scope) makeRoom(key bpf.TemplatesSession) {
	for proved := false; ; {
		c := t.Book.crowded(key.Src)
		if c == crowdNone {
			return
		}
		if c == crowdNewcomers && !proved {
			t.Prove()
			if proved = true; t.Book.eased() && t.Book.crowded(key.Src) != crowdNewcomers {
				continue
			}
		}
		silent := t.Book.silent(c, key, t.lastHeard)
		if len(silent) == 0 {
			return // only this session, which has its own limit
		}
		for _, k := range silent {
			if svc, _ := t.findService(collectorAddr(k)); svc != nil {
				t.refuse(svc.Name, 1)
			}
			t.Forget(k)
		}
	}
}

// Prove marks newcomers that have become proven.
func (t *Scope) Prove() {
	for k, s := range t.Book.Sessions {
		if s.Proven {
			continue
		}
		if h := t.Store.heard(k); h.Messages >= ProvenMessages && h.Last > s.Born+uint64(ProvenAge) {
			t.Book.prove(s)
		}
	}
}

// refuse counts messages and sessions of a service that are not remembered.
func (t *Scope) refuse(service string, n uint64) {
	c := t.counts[service]
	c.Refused += n
	t.counts[service] = c
	t.untold[service] += n
}

// lastHeard returns the time of a session's last message: CLOCK_MONOTONIC, ns.
func (t *Scope) lastHeard(k bpf.TemplatesSession) uint64 { return t.Store.heard(k).Last }

// expire forgets exporters after a long silence, and superseded sessions.
func (t *Scope) expire() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.Prove()
	now := kernel.Monotonic()
	current := t.Book.current(t.lastHeard)
	for k, s := range t.Book.Sessions {
		switch silent := time.Duration(now - t.lastHeard(k)); {
		case silent > sessionLife, silent > newcomerLife && !s.Proven, silent > supersededLife && !current(k):
			t.Forget(k)
		}
	}
}

// countRefused adds the messages refused by the filter to the counts of their services. Services may share a port and
// differ by prefix. The filter ignores the prefix, so the first service gets the count.
func (t *Scope) countRefused() {
	if t.capture == nil {
		return
	}
	for port, n := range t.capture.refused() {
		i := slices.IndexFunc(t.Services, func(s *Service) bool { return slices.Contains(servicePorts(s.Service), port) })
		if i >= 0 {
			t.refuse(t.Services[i].Name, n)
		}
	}
}

// tell logs the messages refused since its last call.
func (t *Scope) tell() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for service, n := range t.untold {
		t.log.Warn("template messages refused, unreadable or too many", "service", service, "netns", t.ns.String(), "messages", n)
	}
	clear(t.untold)
}

func (t *Scope) flushCounts() error {
	t.countRefused()
	for name, c := range t.counts {
		if err := t.Store.count(name, c); err != nil {
			return fmt.Errorf("count templates: %w", err)
		}
		delete(t.counts, name)
	}
	return nil
}
