// SPDX-License-Identifier: Apache-2.0

package live

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// Run supervises metronomes as long as there is a process to do it: a loop that has lost its packet, or was revived on another
// CPU, is put back, and devices that come later get their sessions. It looks once a second. Nothing of detection needs it.
func Run(ctx context.Context, r *kernel.Root, log feature.Logger) error {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	w := watch{r, map[string]known{}}
	for {
		if wrong := w.wrong(); wrong != "" {
			if err := mendNow(ctx, r); err != nil && ctx.Err() == nil {
				log.Warn("liveness is not as it should be", "what", wrong, "reason", err)
			} else if err == nil {
				log.Info("liveness was set right", "what", wrong)
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// watch is what Run knows of namespaces between two looks: what is wanted takes longer to read than all the rest.
type watch struct {
	root  *kernel.Root
	known map[string]known // by scope
}

type known struct {
	text []byte
	published
}

// wrong says what is not as it should be, "" if nothing is, as far as it can be read.
func (w *watch) wrong() string {
	all, err := scopes(w.root)
	if err != nil {
		return ""
	}
	maps.DeleteFunc(w.known, func(scope string, _ known) bool { return !slices.Contains(all, scope) })
	for _, scope := range all {
		if what, err := w.wrongIn(scope); err == nil && what != "" { // else removed meanwhile, or another weir's
			return what
		}
	}
	return ""
}

func (w *watch) wrongIn(scope string) (string, error) {
	meta, err := w.root.Meta(instance(scope))
	if err != nil {
		return "", err
	}
	p := w.known[scope]
	if !bytes.Equal(p.text, meta.Config) {
		if p.published, _, err = readPublished(w.root, scope); err != nil {
			return "", err
		}
		p.text = meta.Config
		w.known[scope] = p
	}
	o, err := w.root.Open(instance(scope), pinSetups, pinClockwork, pinBeats)
	if err != nil {
		return "", err
	}
	defer o.Close()
	var st State
	if err := st.readLoops(o, p.published, kernel.Monotonic()); err != nil {
		return "", err
	}
	for _, l := range st.Loops {
		if l.Silent > time.Second {
			return fmt.Sprintf("the loop of CPU %d does not beat", l.CPU), nil
		}
		if l.CPU >= 0 && int(l.On) != l.CPU {
			return fmt.Sprintf("the loop of CPU %d beats on CPU %d", l.CPU, l.On), nil
		}
	}
	s, err := p.appeared(o)
	if err != nil || s == nil {
		return "", err
	}
	return fmt.Sprintf("device %s of session %s has come", s.Device, s.Name), nil
}

// appeared is a session that waits for its device, which is there by now; nil: there is none.
func (p *published) appeared(o *kernel.Opened) (*Session, error) {
	var waiting []*Session
	var c liveLiveSetup
	for i := range p.Config.Sessions {
		s := &p.Config.Sessions[i]
		if err := o.Maps[pinSetups].Lookup(p.Places[s.Name], &c); err != nil {
			return nil, fmt.Errorf("reading session %q: %w", s.Name, err)
		}
		if c.On == 0 {
			waiting = append(waiting, s)
		}
	}
	if len(waiting) == 0 {
		return nil, nil
	}
	ns, err := netns.Find(p.Netns, p.Inode)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	at := -1
	err = ns.Do(func() error {
		at = slices.IndexFunc(waiting, func(s *Session) bool { _, err := findDevice(s.Device); return err == nil })
		return nil
	})
	if err != nil || at < 0 {
		return nil, err
	}
	return waiting[at], nil
}

func mendNow(ctx context.Context, r *kernel.Root) error {
	l, err := r.Lock(ctx)
	if err != nil {
		return err
	}
	defer l.Unlock()
	return Mend(l)
}
