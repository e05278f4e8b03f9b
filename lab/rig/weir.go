// SPDX-License-Identifier: Apache-2.0

package rig

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/weir-project/weir/feature/steer"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/lab"
	"github.com/weir-project/weir/lab/peers"
)

// ServiceName is what the lab's weir.yaml calls the service.
const ServiceName = "telemetry"

// Weir runs the product as its users do: a configuration file, the command line, `weir serve` beside it.
type Weir struct {
	env    *lab.Env
	binary string
	config string
	socket string

	mu    sync.Mutex
	slots *steer.SlotReader // opened when first asked
}

// NewWeir writes the configuration for collectors in a namespace.
func NewWeir(e *lab.Env, namespace string, port int, collectors []*peers.Collector) (*Weir, error) {
	binary, err := e.Weir()
	if err != nil {
		return nil, err
	}
	w := &Weir{env: e, binary: binary, config: filepath.Join(e.Dir, "weir.yaml"), socket: filepath.Join(e.Dir, "weir.sock")}
	var b strings.Builder
	fmt.Fprintf(&b, `services:
  %s:
    listen: ["udp :%d", "tcp :%[2]d"]
    netns: %s
    steer: {by: source, slots: %d, on_empty: reject, seed: %d}
    members:
`, ServiceName, port, namespace, len(collectors), uint32(e.Seed))
	for _, c := range collectors {
		fmt.Fprintf(&b, "      - {slot: %d, pidfile: %s}\n", c.Number, c.PIDFile)
	}
	return w, os.WriteFile(w.config, []byte(b.String()), 0o644)
}

// Run executes a command of weir and returns its stdout.
func (w *Weir) Run(ctx context.Context, args ...string) ([]byte, error) {
	var out, errs bytes.Buffer
	p, err := w.env.Start(lab.Command{Path: w.binary, Args: append([]string{"--root", w.env.Root, "--socket", w.socket}, args...),
		Stdout: &out, Output: &errs})
	if err != nil {
		return nil, err
	}
	select {
	case <-p.Done():
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if err := p.Err(); err != nil {
		return nil, fmt.Errorf("weir %s: %w: %s", strings.Join(args[:min(3, len(args))], " "), err, strings.TrimSpace(errs.String()))
	}
	return out.Bytes(), nil
}

func (w *Weir) Apply(ctx context.Context) error {
	_, err := w.Run(ctx, "apply", "-f", w.config)
	return err
}

func (w *Weir) Remove(ctx context.Context) error {
	_, err := w.Run(ctx, "remove")
	return err
}

// Serve starts the process that gives slots to members as they start.
func (w *Weir) Serve() (*lab.Process, error) {
	log, err := os.Create(filepath.Join(w.env.Dir, "weir-serve.log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	return w.env.Start(lab.Command{Path: w.binary, Output: log,
		Args: []string{"--root", w.env.Root, "--socket", w.socket, "serve", "--listen", ""}})
}

// Where asks which slot each address belongs to.
func (w *Weir) Where(ctx context.Context, addrs []netip.Addr) (map[netip.Addr]int, error) {
	args := []string{"steer", "where", "--json"}
	for _, a := range addrs {
		args = append(args, a.String())
	}
	out, err := w.Run(ctx, args...)
	if err != nil {
		return nil, err
	}
	var answer struct {
		Addresses []struct {
			Address netip.Addr `json:"address"`
			Slot    int        `json:"slot"`
		} `json:"addresses"`
	}
	if err := json.Unmarshal(out, &answer); err != nil {
		return nil, fmt.Errorf("weir steer where --json: %w: %.200s", err, out)
	}
	slots := map[netip.Addr]int{}
	for _, a := range answer.Addresses {
		slots[a.Address] = a.Slot
	}
	if len(slots) != len(addrs) {
		return nil, fmt.Errorf("weir steer where was asked about %d addresses and answered about %d", len(addrs), len(slots))
	}
	return slots, nil
}

// Rejects reads how much each slot rejected so far, as an operator would: weir steer status.
func (w *Weir) Rejects(ctx context.Context) ([]uint64, error) {
	out, err := w.Run(ctx, "steer", "status", "--json")
	if err != nil {
		return nil, err
	}
	var answer struct {
		Services []struct {
			Slots []struct {
				Verdicts map[string]struct{ Rejected, Dropped, Diverted, Failed uint64 } `json:"verdicts"`
			} `json:"slots"`
		} `json:"services"`
	}
	if err := json.Unmarshal(out, &answer); err != nil || len(answer.Services) != 1 {
		return nil, fmt.Errorf("weir steer status --json: %w: %.200s", err, out)
	}
	var n []uint64
	for _, s := range answer.Services[0].Slots {
		var sum uint64
		for _, v := range s.Verdicts {
			sum += v.Rejected + v.Dropped + v.Diverted + v.Failed
		}
		n = append(n, sum)
	}
	return n, nil
}

// Holder returns the process that holds a slot, 0 for an empty one. It reads the pins without starting a
// process, so that it can be asked every few milliseconds.
func (w *Weir) Holder(slot int) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.slots == nil {
		var err error
		if w.slots, err = steer.OpenSlots(kernel.OpenRoot(w.env.Root), "", ServiceName); err != nil {
			return 0, err
		}
		w.env.OnClose(w.slots.Close)
	}
	pid, admitted, err := w.slots.Admitted(slot)
	if !admitted {
		pid = 0
	}
	return pid, err
}

// Admitted waits until every slot has its collector.
func (w *Weir) Admitted(ctx context.Context, collectors []*peers.Collector, limit time.Duration) error {
	for deadline := time.Now().Add(limit); ; {
		missing := 0
		for i, c := range collectors {
			pid, err := w.Holder(i)
			if err != nil {
				return err
			}
			if !c.Running() {
				return fmt.Errorf("nfacctd %d has ended: %w; see its log in %s", c.Number, c.Err(), c.Dir())
			}
			if pid != c.PID() {
				missing++
			}
		}
		if missing == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			status, _ := w.Run(ctx, "steer", "status")
			return fmt.Errorf("%d of %d slots are still empty after %s:\n%s", missing, len(collectors), limit, status)
		}
		if err := pause(ctx, 10*time.Millisecond); err != nil {
			return err
		}
	}
}
