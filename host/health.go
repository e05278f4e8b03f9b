// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/weir-project/weir/feature"
	"github.com/weir-project/weir/internal/printable"
	"github.com/weir-project/weir/internal/scrape"
	"github.com/weir-project/weir/kernel"
)

// checkEvery is the interval of weir serve's checks for damage.
const checkEvery = time.Second

// Faults returns damage to the pins, and foreign programs at their hooks.
func (h *Host) Faults(ctx context.Context) ([]kernel.Fault, error) {
	return h.check(ctx, kernel.NewChecker(h.Root))
}

// check returns the faults found from the pins and the faults known only to features.
func (h *Host) check(ctx context.Context, c *kernel.Checker) ([]kernel.Fault, error) {
	faults, err := c.Check()
	for _, f := range features {
		x, ok := f.Value.(feature.Checked)
		if !ok {
			continue
		}
		more, xerr := x.Faults(ctx, h.Root)
		faults, err = append(faults, more...), errors.Join(err, xerr)
	}
	return remedied(faults), err
}

const remedyServe = "; if it does not, restart weir serve"

// remedied adapts the remedies of features that weir apply does not attach.
func remedied(faults []kernel.Fault) []kernel.Fault {
	for i, f := range faults {
		if byAgent(f.Feature) && f.Damage() && !strings.HasSuffix(f.Remedy, remedyServe) {
			faults[i].Remedy += remedyServe
		}
	}
	return faults
}

// byAgent reports whether weir serve, not weir apply, attaches the instances of a pin directory.
func byAgent(pins string) bool {
	return slices.ContainsFunc(features, func(f feature.Declared) bool {
		a, ok := f.Value.(feature.AgentPins)
		return ok && a.AgentPins() == pins
	})
}

// damage joins the faults that break something into one error.
func damage(faults []kernel.Fault) error {
	var errs []error
	for _, f := range faults {
		if f.Damage() {
			errs = append(errs, fmt.Errorf("%s: %s", f, f.Remedy))
		}
	}
	return errors.Join(errs...)
}

// watchHealth logs each fault once, and its end, until ctx is done.
func (h *Host) watchHealth(ctx context.Context, log *slog.Logger) error {
	check, told := kernel.NewChecker(h.Root), map[string]kernel.Fault{}
	for range (feature.Loop{Every: checkEvery, Later: true}).Turns(ctx) {
		h.sweep(ctx, log)
		faults, err := h.check(ctx, check)
		if err != nil && ctx.Err() == nil {
			faults = append(faults, kernel.Fault{Object: h.Root.Path(), Kind: kernel.FaultRoot, Text: err.Error()})
		}
		tellFaults(log, remedied(faults), told)
	}
	return nil
}

// sweep removes the pins of gone namespaces whose inode numbers other namespaces have. Taking the lock removes them.
// Features remove their remaining state.
func (h *Host) sweep(ctx context.Context, log *slog.Logger) {
	gone, err := h.Root.PassedOn()
	if err != nil || len(gone) == 0 {
		return // an unreadable root is reported as a fault
	}
	l, err := h.Root.Lock(ctx)
	if err != nil {
		return
	}
	defer l.Unlock()
	if err := recoverAll(l, nil); err != nil {
		log.Warn("recovery failed", "err", err)
	}
	for _, i := range gone {
		log.Info(i.Feature+" removed: its network namespace is gone", i.Feature, strings.TrimPrefix(i.Name, "@"), "netns", i.Scope)
	}
}

// tellFaults logs the changes since told.
func tellFaults(log *slog.Logger, faults []kernel.Fault, told map[string]kernel.Fault) {
	now := map[string]bool{}
	for _, f := range faults {
		key := string(f.Kind) + " " + f.String()
		if now[key] = true; told[key] != (kernel.Fault{}) {
			continue
		}
		told[key] = f
		msg := "pinned state is damaged"
		if !f.Damage() {
			msg = "foreign program runs at weir's hook"
		}
		args := []any{"object", f.Who(), "kind", f.Kind, "err", printable.OneLine(f.Text)}
		if f.Remedy != "" {
			args = append(args, "remedy", f.Remedy)
		}
		log.Warn(msg, args...)
	}
	for key, f := range told {
		if !now[key] {
			delete(told, key)
			log.Info("fault resolved", "object", f.Who(), "kind", f.Kind, "err", printable.OneLine(f.Text))
		}
	}
}

// healthCollector exports health to Prometheus.
type healthCollector struct{ health }

var (
	healthyDesc = prometheus.NewDesc("weir_healthy", "Whether everything declared in the file is in force, as in /healthz.", nil, nil)
	faultDesc   = prometheus.NewDesc("weir_faults", "Faults of an instance by kind: root, pins, detached, program are damage; ahead is a foreign program at weir's hook.",
		[]string{"feature", "object", "kind"}, nil)
	configDesc      = prometheus.NewDesc("weir_config_info", "The configuration in force, by the SHA-256 of its file. Absent if none was applied since boot, or if an instance was lost with its network namespace.", []string{"hash"}, nil)
	applyTimeDesc   = prometheus.NewDesc("weir_config_last_apply_timestamp_seconds", "Time of the last apply, successful or not.", nil, nil)
	applyOKDesc     = prometheus.NewDesc("weir_config_last_apply_success", "Whether the last apply made the host match its file, and no instance was lost with its network namespace since.", nil, nil)
	unconfirmedDesc = prometheus.NewDesc("weir_unconfirmed_left_seconds", "Time until an unconfirmed change is rolled back; negative: the rollback is overdue. Absent without such a change.", nil, nil)
)

// Describe implements prometheus.Collector.
func (c healthCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- healthyDesc
	ch <- faultDesc
	ch <- unconfirmedDesc
	ch <- configDesc
	ch <- applyTimeDesc
	ch <- applyOKDesc
}

// Collect implements prometheus.Collector.
func (c healthCollector) Collect(ch chan<- prometheus.Metric) {
	faults, err := c.check(context.Background())
	ch <- scrape.Const(healthyDesc, prometheus.GaugeValue, feature.Gauge(err == nil))
	if u, err := c.host.Unconfirmed(); err == nil && u.Waits() {
		ch <- scrape.Const(unconfirmedDesc, prometheus.GaugeValue, u.Left.Seconds())
	}
	if a, err := c.host.readApplied(); err == nil && a != nil {
		incomplete := c.file.incomplete()
		if a.Hash != "" && !incomplete {
			ch <- scrape.Const(configDesc, prometheus.GaugeValue, 1, a.Hash)
		}
		if !a.Time.IsZero() {
			ch <- scrape.Const(applyTimeDesc, prometheus.GaugeValue, float64(a.Time.UnixNano())/1e9)
			ch <- scrape.Const(applyOKDesc, prometheus.GaugeValue, feature.Gauge(a.Success && !incomplete))
		}
	}
	counts := map[[3]string]int{}
	for _, f := range faults {
		counts[[3]string{f.Feature, f.Object, string(f.Kind)}]++
	}
	for labels, n := range counts {
		ch <- scrape.Const(faultDesc, prometheus.GaugeValue, float64(n), labels[:]...)
	}
}

// recoverVerb is the verb of recovery steps.
const recoverVerb = "recover"

// recoveries returns the steps to recover damaged instances, of the features in only if it is not empty. They come first
// in an Apply, which then finds the previous state.
func (h *Host) recoveries(faults []kernel.Fault, only []string) (steps []feature.Step) {
	why := map[kernel.Instance][]string{}
	for _, f := range faults {
		why[f.Instance] = append(why[f.Instance], f.Text)
	}
	add := func(i kernel.Instance, detail string) {
		if len(only) > 0 && !slices.Contains(only, i.Feature) {
			return
		}
		steps = append(steps, feature.Step{Verb: recoverVerb, Object: i.String(), Detail: detail,
			Do: func(_ context.Context, l *kernel.WriteLock) (string, error) { return recoverInstance(l, i) }})
	}
	for _, i := range h.Root.Lost() {
		add(i, "lost with its BPF file system")
	}
	for _, i := range kernel.Damaged(faults) {
		add(i, strings.Join(why[i], "; "))
	}
	return steps
}

// ownMap reports whether a map's name in the kernel is one of weir's.
func ownMap(name string) bool {
	for _, f := range features {
		prefixes := []string{f.Name + "_"}
		if m, ok := f.Value.(feature.Mapped); ok {
			prefixes = m.MapPrefixes()
		}
		if slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(name, p) }) {
			return true
		}
	}
	return false
}

// publishes reports whether a feature has instances of this name.
func publishes(f feature.Declared, i kernel.Instance) (ok bool) {
	if r, is := f.Value.(feature.Recorded); is {
		if _, ok = r.PinnedMaps(i); ok {
			return true
		}
	}
	return f.Name == i.Feature
}

// neededMaps returns the names of the maps without which an instance of this name is something else. ok is false if no
// feature has such instances.
func neededMaps(i kernel.Instance) (names []string, ok bool) {
	for _, f := range features {
		if r, is := f.Value.(feature.Recorded); is {
			if names, ok := r.PinnedMaps(i); ok {
				return names, true
			}
		} else if f.Name == i.Feature {
			return nil, true // a library's own feature
		}
	}
	return nil, feature.IsApplied(i)
}

// recoverInstance restores the living parts of an instance. Its feature recreates the rest. A record of nothing is
// removed.
func recoverInstance(l *kernel.WriteLock, i kernel.Instance) (note string, err error) {
	needed, ok := neededMaps(i)
	if !ok {
		l.ForgetDamaged(func(other kernel.Instance) bool { return other == i })
		return "ignored: no feature of this weir has such an instance", nil
	}
	lacks, err := l.Restore(i, ownMap, needed...)
	if errors.Is(err, kernel.ErrForeignRecord) {
		return "ignored: " + err.Error(), nil
	}
	if err == nil && len(lacks) == 0 {
		return "", nil
	}
	for _, f := range features {
		r, ok := f.Value.(feature.Completer)
		if ok && f.Name == i.Feature {
			note, err := r.Complete(l, i, lacks)
			if errors.Is(err, kernel.ErrABI) { // the plan reports it too
				return "stays as it is: " + err.Error(), nil
			}
			return note, err
		}
	}
	if errors.Is(err, kernel.ErrNoRecord) && !byAgent(i.Feature) {
		return "recreated", l.Remove(i)
	}
	if err != nil || byAgent(i.Feature) {
		return "", err // its agent attaches it
	}
	if slices.ContainsFunc(lacks, func(pin string) bool { return strings.HasPrefix(pin, "map_") }) {
		return "recreated", l.Remove(i)
	}
	for _, pin := range lacks { // the plan or recovery adds missing attachments
		if err := l.RemoveLink(i, strings.TrimPrefix(pin, "link_")); err != nil {
			return "", err
		}
	}
	return "attached again", nil
}
