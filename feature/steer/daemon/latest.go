// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"

	"github.com/weir-project/weir/feature/steer/engine"
	"github.com/weir-project/weir/feature/steer/slots"
	"github.com/weir-project/weir/kernel"
)

// errOutdated means that a later supervision has the slot, or waits for it.
var errOutdated = errors.New("a later weir steer run replaces this member")

// latest is the newest weir steer run --replace of a slot. Several wait at the same time, and the first to poll takes
// the slot: without this note, an earlier start could replace a later one. The note is kept beside the records. Without
// it, every start waits for its turn.
type latest struct {
	Began uint64        `json:"began"` // CLOCK_BOOTTIME, ns
	Boot  string        `json:"boot"`
	Who   slots.Process `json:"who"`
}

func (s *supervisor) latestName() string {
	return fmt.Sprintf("latest+%s+%s+%d", s.Slot.Scope, s.Slot.Service, s.Slot.Slot)
}

// readLatest returns the latest supervision of the slot, or the zero value if none is alive. A start in the future is
// forged: it would end every later one.
func (s *supervisor) readLatest() (l latest) {
	text, err := s.root.Kept(s.latestName())
	if err != nil || text == nil || json.Unmarshal(text, &l) != nil || l.Boot != kernel.BootID() || l.Began > kernel.Boottime() || !l.Who.Alive() {
		return latest{}
	}
	return l
}

// outdated returns an error if a later supervision has the slot, or waits for it.
func (s *supervisor) outdated() error {
	if l := s.readLatest(); l.Began > s.began {
		return fmt.Errorf("give up slot %d of %s: %w: process %d began later", s.Slot.Slot, s.Slot.Service, errOutdated, l.Who.PID)
	}
	return nil
}

// announce makes this supervision the latest one of the slot. The daemon is ready: it has the slot, or waits for the
// end of a drain.
func (s *supervisor) announce(ctx context.Context) {
	if s.announced || !s.replaces {
		return
	}
	l, err := s.root.Lock(ctx)
	if err != nil {
		return // it tries again
	}
	defer l.Unlock()
	s.announced = true
	if s.outdated() != nil {
		return
	}
	who, err := slots.FindProcess(os.Getpid())
	text, jerr := json.Marshal(latest{s.began, kernel.BootID(), who})
	if err = cmp.Or(err, jerr); err == nil {
		err = l.Keep(s.latestName(), text)
	}
	if err != nil {
		s.Log.Warn("start not recorded, an earlier run may replace the daemon", "service", s.Slot.Service, "slot", s.Slot.Slot, "err", err)
	}
}

// forgetLatest removes the file of an ended supervision.
func (s *supervisor) forgetLatest() {
	if !s.announced {
		return
	}
	l, err := s.root.Lock(context.Background())
	if err != nil {
		return // it counts for a living process only
	}
	defer l.Unlock()
	if now := s.readLatest(); now.Began <= s.began {
		_ = l.Forget(s.latestName())
	}
}

// ready reports whether a result of an admission shows a complete daemon.
func ready(err error) bool { return err == nil || errors.Is(err, engine.ErrDraining) }
