// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"strings"
	"sync"
	"time"

	"github.com/weir-project/weir/lab/rig"
)

func init() {
	Register(Demo{
		Name:  "upgrade",
		Short: "weir replaces its own programs in the kernel while 60 clients send requests; none is lost",
		Needs: []string{"nginx"},
		Run: func(ctx context.Context, s *Stage) error {
			d := &upgrading{steering: &steering{Stage: s}}
			return all(ctx, d.build, d.with, d.upgrade)
		},
	})
}

// upgrading is the demonstration of upgrades, on the servers of the demonstration of steering.
type upgrading struct {
	*steering

	mu             sync.Mutex
	requests, lost int
	strayed        int
}

// upgrade changes to another build several times, under traffic.
func (d *upgrading) upgrade(ctx context.Context) error {
	if err := d.Say(ctx, "another build of weir is installed. weir upgrade replaces the programs in the kernel; each packet meets the old one or the new one"); err != nil {
		return err
	}
	weir, err := rig.NewWeirFrom(d.Env, "services: {}")
	if err != nil {
		return err
	}
	if err := weir.Rebuild(); err != nil {
		return err
	}
	stop := d.traffic(ctx)
	defer stop()
	times := 10 // even: the installed build is the last
	if d.Short() {
		times = 4
	}
	for i := range times {
		steps, err := weir.Upgrade(ctx)
		if err != nil {
			return err
		}
		if i == 0 {
			d.Typed("weir upgrade")
			d.Output(strings.Join(steps, ""), shownLines)
			err = d.Say(ctx, "and %d times more, to the old build and back", times-1)
		}
		if err == nil {
			err = pause(ctx, 300*time.Millisecond)
		}
		if err != nil {
			return err
		}
	}
	stop()
	d.mu.Lock()
	requests, lost, strayed := d.requests, d.lost, d.strayed
	d.mu.Unlock()
	d.Check(requests > 0 && lost == 0, "%d requests during %d upgrades, %d without an answer", requests, times, lost)
	d.Check(strayed == 0, "no client met another server than its own")
	d.Sum("%d upgrades under traffic: %d requests, %d lost, %d at another server.", times, requests, lost, strayed)
	_, err = d.host.Type(ctx, "steer", "status", "web")
	return err
}

// traffic makes all clients send requests until the returned function is called.
func (d *upgrading) traffic(ctx context.Context) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			for i, a := range d.ask(ctx) {
				d.mu.Lock()
				d.requests++
				if a.err != nil || a.from == "" {
					d.lost++
				} else if a.from != d.homes[i] {
					d.strayed++
				}
				d.mu.Unlock()
			}
			_ = pause(ctx, 20*time.Millisecond)
		}
	}()
	return func() { cancel(); <-done }
}
