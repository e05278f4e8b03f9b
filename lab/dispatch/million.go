// SPDX-License-Identifier: Apache-2.0

package dispatch

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/weir-project/weir/feature/steer/bindings"
	"github.com/weir-project/weir/kernel"
	"github.com/weir-project/weir/lab"
)

// sizeName returns the suffix of a size's metrics.
func sizeName(n int) string {
	switch n {
	case 1000:
		return "1k"
	case 100_000:
		return "100k"
	case maxBindings:
		return "1m"
	}
	return fmt.Sprint(n)
}

// million runs the part with all services and all bindings.
func (x *experiment) million(ctx context.Context) error {
	var plain *site
	var files [2]string
	var sets [2]*set
	begin := time.Now()
	x.say("%d services with a registered socket each; %d bindings", x.services, x.bindings)
	err := together(
		func() (err error) {
			x.many, err = x.site(ctx, "many", x.services, true, x.trie.c.Maps["sockets"])
			x.result.Set("register_all_s", time.Since(begin).Seconds())
			if err == nil && x.sizes != nil {
				plain, err = x.site(ctx, "plain", x.services, false, nil)
			}
			return err
		},
		func() error {
			for i := range sets {
				sets[i] = drawSet(x.bindings, x.services, x.rand("set", i))
				files[i] = filepath.Join(x.env.Dir, fmt.Sprintf("bindings-%d.json", i))
				if err := writeFile(files[i], sets[i].bindings(x.bindings)); err != nil {
					return err
				}
			}
			return nil
		})
	if err != nil {
		return err
	}
	if x.sizes == nil {
		return x.once(ctx, files[0], sets[0])
	}
	return x.timed(ctx, plain, files, sets)
}

// together runs functions at the same time and joins their errors.
func together(all ...func() error) error {
	errs := make([]error, len(all))
	var wg sync.WaitGroup
	for i, f := range all {
		wg.Go(func() { errs[i] = f() })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// once runs the checks without timing.
func (x *experiment) once(ctx context.Context, file string, s *set) error {
	if _, err := x.trie.fill(s, x.bindings); err != nil {
		return err
	}
	if _, err := x.replace(ctx, file); err != nil {
		return err
	}
	return x.check(ctx, s)
}

// timed runs all measurements: lookups with growing bindings, traffic, commands.
func (x *experiment) timed(ctx context.Context, plain *site, files [2]string, sets [2]*set) error {
	s := sets[0]
	for _, n := range x.sizes[:len(x.sizes)-1] {
		if err := together(func() error { return x.bind(ctx, x.many, s.bindings(n)) },
			func() error { _, err := x.trie.fill(s, n); return err }); err != nil {
			return err
		}
		if err := x.measureLookups(ctx, s, n, sizeName(n)); err != nil {
			return err
		}
	}
	one := &set{s.hosts, s.at, 1}
	x.say("%d bindings of one service", x.bindings)
	err := together(func() error { return x.bind(ctx, x.many, one.bindings(x.bindings)) }, func() error {
		took, err := x.trie.fill(s, x.bindings)
		x.result.Set("trie_fill_s", took.Seconds())
		return err
	})
	if err != nil {
		return err
	}
	if err := x.bind(ctx, x.few, one.bindings(1)); err != nil {
		return err
	}
	if err := x.measureGrowth(ctx, one, s); err != nil {
		return err
	}
	return x.commands(ctx, plain, files, sets)
}

// commands replaces all bindings by the other set and back, times this, and runs the measurements on all
// bindings.
func (x *experiment) commands(ctx context.Context, plain *site, files [2]string, sets [2]*set) error {
	var took []float64
	for n := range x.replaces {
		x.say("replacing all %d bindings", x.bindings)
		s, err := x.replace(ctx, files[(n+x.replaces+1)%2]) // the first set is the last
		if err != nil {
			return err
		}
		took = append(took, s)
	}
	x.result.Set("replace_1m_s", median(took))
	x.result.Set("replace_1m_s_max", slices.Max(took))
	if err := x.measureLookups(ctx, sets[0], x.bindings, sizeName(x.bindings)); err != nil {
		return err
	}
	m := x.result.Metrics
	x.result.Set("growth_1_to_1m_all_services", m["ns_weir_random_hit_1m"]/m["ns_weir_random_hit_1"])
	if fetch := m["ns_weir_random_hit_1m"] - m["ns_weir_random_hit_one_service_1m"]; fetch > 0 {
		x.result.Set("ceiling_random_hit_1m", m["ns_trie_random_hit_1m"]/fetch)
	}
	x.result.Set("test_runs", float64(x.testRuns))
	x.result.Set("test_runs_interrupted", float64(x.interrupted))
	if err := x.measureTraffic(ctx, straight(plain), bound(x.many, sets[0])); err != nil {
		return err
	}
	if err := x.timeBinds(ctx, sets[0]); err != nil {
		return err
	}
	if err := x.measureMemory(); err != nil {
		return err
	}
	return x.check(ctx, sets[0])
}

// replace runs the command and returns its duration in seconds.
func (x *experiment) replace(ctx context.Context, file string) (float64, error) {
	begin := time.Now()
	_, err := x.weir.Run(ctx, "bind", "replace", "--netns", x.many.name, "--lines", "0", file)
	return time.Since(begin).Seconds(), err
}

// timeBinds times commands binding a new host each, then commands binding these to another service, and
// removes all of them. The maximum of bindings is reached, so some of the set are removed meanwhile.
func (x *experiment) timeBinds(ctx context.Context, s *set) error {
	x.say("binding single hosts among %d", x.bindings)
	own := func(command string) error {
		for i := range x.binds {
			b := s.binding(i)
			if _, err := x.weir.Run(ctx, "bind", command, "--netns", x.many.name, b.Service, b.Proto.String(), b.Prefix.String(), fmt.Sprint(b.Port)); err != nil {
				return err
			}
		}
		return nil
	}
	if err := own("remove"); err != nil {
		return err
	}
	host := func(i int) string { return netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}).String() }
	steps := []struct{ metric, command, service string }{
		{"bind_ms", "add", serviceName(0)}, {"rebind_ms", "add", serviceName(2)}, {"unbind_ms", "remove", serviceName(2)},
	}
	for _, s := range steps {
		var took []time.Duration
		for i := range x.binds {
			begin := time.Now()
			if _, err := x.weir.Run(ctx, "bind", s.command, "--netns", x.many.name, s.service, "udp", host(i), fmt.Sprint(boundPort)); err != nil {
				return err
			}
			took = append(took, time.Since(begin))
		}
		p50, _, longest := lab.Percentiles(took)
		x.result.Set(s.metric+"_p50_1m", milliseconds(p50))
		x.result.Set(s.metric+"_max_1m", milliseconds(longest))
	}
	return own("add")
}

// measureMemory sets the kernel's charge for the programs' maps. For LPM_TRIE it counts bindings, not the
// nodes between them.
func (x *experiment) measureMemory() error {
	prog, err := weirProgram(x.many.ns)
	if err != nil {
		return err
	}
	defer prog.Close()
	isBound := func(name string) bool { return strings.HasPrefix(name, "bound_") }
	all := func(string) bool { return true }
	for metric, of := range map[string]func() (float64, error){
		"memory_mb_weir_bindings_1m": func() (float64, error) { return mapMemory(prog, isBound) },
		"memory_mb_weir_all_1m":      func() (float64, error) { return mapMemory(prog, all) },
		"memory_mb_trie_bindings_1m": func() (float64, error) {
			return mapMemory(x.trie.c.Programs["trie_dispatch"], func(name string) bool { return name == "bindings" })
		},
		"memory_mb_trie_all_1m": func() (float64, error) { return mapMemory(x.trie.c.Programs["trie_dispatch"], all) },
	} {
		mb, err := of()
		if err != nil {
			return err
		}
		x.result.Set(metric, mb)
	}
	return nil
}

// check reads back bindings and registrations, compares the choices of the programs, and queries services
// over the network.
func (x *experiment) check(ctx context.Context, s *set) error {
	x.say("reading %d bindings and %d services back, and asking %d over the network", x.bindings, x.services, x.ask)
	r := kernel.OpenRoot(x.env.Root)
	have, err := bindings.Bindings(ctx, r, x.many.scope())
	if err != nil {
		return err
	}
	right := 0
	for _, b := range have {
		a := b.Prefix.Addr().As4()
		i, ok := s.at[uint32(a[0])<<24|uint32(a[1])<<16|uint32(a[2])<<8|uint32(a[3])]
		if ok && b == s.binding(i) {
			right++
		}
	}
	if len(have) != right {
		x.result.Note("%d bindings read back differ", len(have)-right)
	}
	x.result.Set("bindings", float64(right))
	named, err := bindings.NamedServices(ctx, r, x.many.scope())
	if err != nil {
		return err
	}
	live := 0
	for _, n := range named {
		if n.Bindings > 0 && len(n.Sockets) == 1 && n.Sockets[0].Local.IsValid() {
			live++
		}
	}
	x.result.Set("services", float64(live))
	if err := x.compareChoices(s, x.bindings); err != nil {
		return err
	}
	return x.askSome(x.many, s, x.ask)
}
