// SPDX-License-Identifier: Apache-2.0

package peers

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/feature/reroute/bfd/engine"
	"github.com/weir-project/weir/internal/netns"
	"github.com/weir-project/weir/kernel"
)

// Run looks after sessions as long as there is a process to do it: neighbours that have not answered yet, devices that come or
// come anew; and it runs the sessions that bfdd hands over. Those of the configuration need it for nothing else.
func Run(ctx context.Context, r *kernel.Root, log feature.Logger) error {
	ctx, cancel := context.WithCancel(ctx)
	var all sync.WaitGroup
	defer all.Wait()
	defer cancel()
	left := inherit()
	running := map[string]runner{} // by scope
	news := map[string]*told{}     // by scope
	var said feature.Reported[string]
	for range (feature.Loop{Every: time.Second}).Turns(ctx) {
		now, _, _, err := readPublished(r)
		if err != nil {
			log.Warn("BFD sessions cannot be read", "err", err)
		}
		for scope, have := range running {
			if p, there := now[scope]; err == nil && (!there || p.Config.FRR != have.frr) {
				have.stop()
				delete(running, scope)
				if !there { // what comes there next is another, and nothing was told of it
					delete(news, scope)
				}
			}
		}
		for scope, p := range now {
			if news[scope] == nil {
				news[scope] = &told{r: r, scope: scope, log: log, up: map[uint32]bool{}}
			}
			if have, runs := running[scope]; runs {
				have.know(p.Config)
			} else {
				running[scope] = start(ctx, r, p, left[scope], news[scope], log, &all)
				delete(left, scope)
			}
			why := ""
			if err := p.startNew(ctx, r); err != nil && ctx.Err() == nil {
				why = err.Error()
			}
			if said.Changed(scope, why) && why != "" {
				log.Warn("BFD sessions wait", "netns", p.Netns, "reason", why)
			}
			news[scope].all()
		}
		if err == nil { // of namespaces that have no BFD any more
			drop(left)
			left = nil
		}
	}
	return nil
}

// again is how long after its end, by an error or since BFD was made anew, it is begun again: later than Run sees that a
// namespace has none any more.
const again = 5 * time.Second

// runner looks after the sessions of a namespace.
type runner struct {
	frr    string
	config *atomic.Pointer[Config]
	stop   func()
}

// know has the runner go by a configuration from now on.
func (r *runner) know(c Config) {
	if !reflect.DeepEqual(*r.config.Load(), c) {
		r.config.Store(&c)
	}
}

func start(life context.Context, r *kernel.Root, p published, inherited *inherited, t *told, log feature.Logger, all *sync.WaitGroup) runner {
	ctx, cancel := context.WithCancel(life)
	config := &atomic.Pointer[Config]{}
	config.Store(&p.Config)
	own := func() error { return configured(ctx, r, p, config, t, log) }
	ofFRR := func() error {
		l := inherited
		inherited = nil // it is for the first time
		return handedOver(ctx, life, r, p, config, l, log)
	}
	for _, part := range []func() error{own, ofFRR} {
		all.Go(func() {
			for ctx.Err() == nil {
				if err := part(); err != nil && ctx.Err() == nil {
					log.Warn("BFD", "netns", p.Netns, "err", err)
				}
				select {
				case <-ctx.Done():
				case <-time.After(again):
				}
			}
		})
	}
	return runner{p.Config.FRR, config, cancel}
}

// configured is about the sessions of the configuration, also of those that come later.
func configured(ctx context.Context, r *kernel.Root, p published, config *atomic.Pointer[Config], t *told, log feature.Logger) error {
	ns, err := netns.Find(p.Netns, p.ID)
	if err != nil {
		return err
	}
	defer ns.Close()
	e, err := engine.OpenThere(ctx, r, ns, config.Load().Tick())
	if errors.Is(err, kernel.ErrNotExist) {
		return nil // removed meanwhile: Run ends this
	} else if err != nil {
		return err
	}
	defer e.Close()
	ctx, cancel := context.WithCancel(ctx)
	var other sync.WaitGroup
	defer other.Wait()
	defer cancel()
	other.Go(func() { keepTick(ctx, e, config) })
	other.Go(func() { t.changes(ctx, e) })
	e.Run(ctx, func(err error) { log.Warn("BFD sessions lack a neighbour or a device", "netns", p.Netns, "err", err) })
	return nil
}

// keepTick has an engine see to the ticks that the configuration asks for at any moment: those of when it was opened may be shorter by
// now than anybody needs.
func keepTick(ctx context.Context, e interface{ SetTick(time.Duration) }, config *atomic.Pointer[Config]) {
	for range (feature.Loop{Every: time.Second}).Turns(ctx) {
		e.SetTick(config.Load().Tick())
	}
}

// startNew has sessions begin whose devices have come, or are others by now.
func (p *published) startNew(ctx context.Context, r *kernel.Root) error {
	ns, err := netns.Find(p.Netns, p.ID)
	if err != nil {
		return err
	}
	defer ns.Close()
	wanted, err := p.resolve(ns)
	if err != nil {
		return err
	}
	found, err := engine.Published{Scope: fmt.Sprint(ns.Inode())}.Identities(r)
	if errors.Is(err, kernel.ErrNotExist) {
		return nil // removed meanwhile
	} else if err != nil {
		return err
	}
	for name, s := range wanted {
		if found[p.Discriminators[name]] != s.identity() {
			l, err := r.Lock(ctx)
			if err != nil {
				return err
			}
			defer l.Unlock()
			// A command that held the lock may have removed or changed the sessions.
			if now, _, _, err := readPublished(r); err != nil || !reflect.DeepEqual(now[kernel.ScopeOf(ns)], *p) {
				return err
			}
			return p.apply(ctx, l)
		}
	}
	return nil
}
