// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/weir-project/weir/feature"
)

// instanceName identifies an instance of a file. It omits the scope, because a service's instance moves between network
// namespaces.
type instanceName struct{ feature, name string }

// applied returns the scopes of the instances applied by this process, without derived ones.
func (w *follower) applied() (map[instanceName]string, error) {
	all, err := w.host.Root.Instances("")
	if err != nil {
		return nil, err
	}
	some := featuresOnly(w.only)
	out := map[instanceName]string{}
	for _, i := range all {
		at := slices.IndexFunc(some, func(f feature.Declared) bool { return f.Name == i.Feature })
		if at < 0 {
			continue
		}
		if !strings.HasPrefix(i.Name, "@") {
			out[instanceName{i.Feature, i.Name}] = i.Scope
		} else if s, ok := some[at].Value.(feature.Shared); ok && s.Shares(i.Name) {
			out[instanceName{i.Feature, i.Name + " of net:[" + i.Scope + "]"}] = i.Scope
		}
	}
	return out, nil
}

// check detects instances of the file in force that were lost with their network namespace, for example when a container
// restarts. Instances removed by a command or by another file are not lost. check applies their features again until
// that succeeds.
func (w *follower) check(ctx context.Context) {
	if w.due || len(w.sockets) > 0 || time.Now().Before(w.pause) {
		return // the whole file is due, or nothing is pinned
	}
	now, err := w.applied()
	if err != nil {
		return // reported elsewhere as a fault
	}
	var lost []instanceName
	for i := range w.had {
		if _, there := now[i]; !there {
			lost = append(lost, i)
		}
	}
	if len(lost) == 0 {
		w.had = now
		return
	}
	err = w.restore(ctx, lost)
	if ctx.Err() != nil {
		return
	}
	w.noteLost(err != nil)
	w.noteAttempt(err, w.log)
	if err != nil {
		w.pause = time.Now().Add(retryEvery)
		return
	}
	w.had, _ = w.applied()
}

// restore applies the features of lost instances again, unless an operator has applied another file meanwhile.
func (w *follower) restore(ctx context.Context, lost []instanceName) error {
	features := map[string]bool{}
	var names []string
	for _, i := range lost {
		features[i.feature] = true
		names = append(names, i.feature+" "+i.name)
	}
	slices.Sort(names)
	text := strings.Join(names, ", ")
	only := slices.Sorted(maps.Keys(features))
	if w.superseded(only) && !w.adopt(only) {
		w.log.Info("lost instances not applied again: replaced by another file, or removed", "lost", text)
		return nil
	}
	c := *w.spec
	c.Only = only
	err := w.located(ctx, only)
	if err == nil {
		_, err = w.host.Plan(ctx, &c) // without the lock, because commands wait for it and the namespace may stay away
	}
	if err == nil {
		w.log.Info("applying lost instances again", "lost", text)
		_, err = w.apply(ctx, w.host, &c, w.log)
	}
	if err != nil {
		return fmt.Errorf("%s: lost with the network namespace: %w", text, err)
	}
	return nil
}

// adopt takes over the new contents of weir serve's file, if weir apply has applied them for these features.
func (w *follower) adopt(names []string) bool {
	next, err := w.load()
	if err != nil {
		return false
	}
	now := w.host.filesInForce()
	if slices.ContainsFunc(names, func(name string) bool { return now[name] != next.hash }) {
		return false
	}
	w.spec, w.before = next, now
	return true
}

// located returns an error for a service without a known network namespace: it names none, and no member runs. Applying
// it would move it to weir serve's namespace.
func (w *follower) located(ctx context.Context, names []string) error {
	here, err := currentScope()
	if err != nil {
		return err
	}
	elsewhere := func(name string) bool {
		return slices.ContainsFunc(names, func(f string) bool {
			scope, had := w.had[instanceName{f, name}]
			return had && scope != here && byService(f)
		})
	}
	for _, name := range slices.Sorted(maps.Keys(w.spec.Services)) {
		if !elsewhere(name) {
			continue
		}
		ns, certain, err := w.spec.Services[name].FindNetns(ctx)
		if err != nil {
			return w.spec.Services[name].Pos.Errorf("services.%s: netns: %w", name, err)
		}
		ns.Close()
		if !certain {
			return fmt.Errorf("services.%s: no member runs: start one to determine the network namespace", name)
		}
	}
	return nil
}

// byService reports whether a feature has an instance for each service, in the network namespace of its members.
func byService(name string) bool {
	return slices.ContainsFunc(features, func(f feature.Declared) bool {
		_, ok := f.Value.(feature.ServiceSectioned)
		return ok && f.Name == name
	})
}

func featureNames(all []feature.Declared) (out []string) {
	for _, f := range all {
		out = append(out, f.Name)
	}
	return out
}
