// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"

	"github.com/weir-project/weir/feature/steer/record"
	"github.com/weir-project/weir/feature/steer/spec"
	"github.com/weir-project/weir/kernel"
)

// TemplatesName is the instance that holds what is remembered of exporters: it
// outlives weir serve, so that one that is restarted just before a collector
// still knows their templates.
const TemplatesName = "@templates"

// TemplatesInstance names the pins of a namespace's templates.
func TemplatesInstance(scope string) kernel.Instance {
	return kernel.Instance{Scope: scope, Feature: spec.Name, Name: TemplatesName}
}

// RemoveTemplates forgets a namespace's exporters when no service is left there.
func RemoveTemplates(l *kernel.WriteLock, scope string) error {
	all, err := l.Instances(spec.Name)
	if err != nil {
		return err
	}
	for _, i := range all {
		if i.Scope == scope && kernel.ValidName(i.Name) {
			return nil
		}
	}
	if _, err := record.Shared.Read(l.Root, TemplatesInstance(scope)); errors.Is(err, kernel.ErrABI) {
		return nil // another weir's
	}
	return l.Remove(TemplatesInstance(scope))
}
